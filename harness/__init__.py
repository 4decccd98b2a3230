"""Measures any attention backend: workload -> backend -> gate -> timer -> record -> store."""
