"""What the proxy decides, and nothing it does: no asyncio, clock, logging or I/O in here."""
