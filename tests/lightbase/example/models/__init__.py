"""Networks in plain torch."""
