"""Worker processes, the dp x tp mesh, and how each parameter is split over it. Knows no model's code."""
