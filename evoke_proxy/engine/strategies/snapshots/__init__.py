"""Strategy for stock llama-servers: saves slots to disk and restores them."""
