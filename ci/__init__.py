"""The nightly job: thresholds, baselines by machine, and what runs them."""
