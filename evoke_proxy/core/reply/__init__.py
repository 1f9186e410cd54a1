"""What a reply says while its bytes go by: the answer, the books, what came of what was asked."""
