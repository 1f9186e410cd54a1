"""What outlives a turn: copies, records, snapshots, on disk and within bounds."""
