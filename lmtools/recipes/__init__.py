"""Published numbers as recipes: ordinary commands in order, and what comes out beside what was published."""
