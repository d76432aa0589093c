"""Studies: run trials in parallel, record every step, say what the numbers show."""
