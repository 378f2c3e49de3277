"""The code that the pages of "Attention You Can Run" show, run and teach."""
