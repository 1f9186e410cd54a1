"""What operators see and change: sessions, metrics, erasure."""
