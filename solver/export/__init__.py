"""Write a plan in the form that a framework reads."""
