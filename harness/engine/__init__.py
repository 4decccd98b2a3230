"""Level `engine`: time per output token inside an unmodified vLLM (docs/engine.md)."""
