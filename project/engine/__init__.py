"""From the command line to the test result: nothing in here is to be edited, or known, to use the
template."""
