"""llama-servers: what one is and can do, who has its slots, which of several takes a request."""
