"""Records -> flat rows -> tables.  Never prints, imports no torch."""
