"""Profilers run beside a measurement, never inside it: one case once more in a process of its own.  Their times are no
latencies; their bytes are what a row's analytic bytes are held against.
"""
