"""Pure decisions of the proxy: no asyncio, clock, logging or I/O."""
