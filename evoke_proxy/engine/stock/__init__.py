"""What an unpatched llama-server is helped with: its slots survive restarts, sleeps and guests."""
