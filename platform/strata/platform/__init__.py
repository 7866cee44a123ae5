"""What every room stands on: recipes, runs, the local Ray cluster and the command line."""
