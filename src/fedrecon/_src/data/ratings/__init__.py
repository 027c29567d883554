"""Ratings: files, MovieLens, synthetic ones."""
