"""LOCKS: page-local compact key summaries for sparse decode attention, and its rivals.  Knows nothing of the benchmark."""
