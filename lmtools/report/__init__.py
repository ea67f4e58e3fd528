"""One page that shows runs and results: sources -> breakdowns and charts -> HTML and PNG."""
