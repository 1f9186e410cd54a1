"""How much does a conversation on a budget recall, compared with one without a budget?"""
