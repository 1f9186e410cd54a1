"""Cache strategies: what one llama-server offers decides how chat requests use its cache."""
