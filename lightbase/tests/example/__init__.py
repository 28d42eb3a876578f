"""A small project, which the tests of the library train."""
