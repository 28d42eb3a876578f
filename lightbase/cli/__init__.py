"""From flags and YAML to objects, or to a clear error."""
