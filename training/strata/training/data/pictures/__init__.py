"""Pictures with captions: generated ones, a user's folder of them, and the noise that training adds."""
