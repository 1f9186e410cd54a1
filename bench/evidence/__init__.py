"""Evidence in real conversations: is it in the cache when the answer begins?"""
