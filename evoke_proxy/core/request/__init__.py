"""What a request says, in which dialect, with which of our fields, and its bytes as sent on."""
