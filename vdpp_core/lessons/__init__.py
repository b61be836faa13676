"""How training is split over GPUs: the sizing rules of an article, checked. Nothing else imports this."""
