"""Data modules: splits, folds, batches, and data sets of files."""
