"""How training is split: the sizing rules of an article, checked. Nothing imports this."""
