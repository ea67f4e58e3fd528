"""What a configuration needs before it is run: memory, traffic, work, hours. Arithmetic, on shapes alone."""
