"""Single-device models. They know nothing of parallelism; `lmtools.parallel` splits them from outside."""
