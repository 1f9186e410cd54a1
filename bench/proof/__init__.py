"""Ten minutes that check the main claims on the reader's machine, with a seed of the reader's."""
