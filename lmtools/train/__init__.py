"""Training: what an update is made of, and the loop that makes them."""
