"""llama-servers: capabilities, assignment of slots, and the choice among several servers."""
