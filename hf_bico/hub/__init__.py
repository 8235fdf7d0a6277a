"""Find, pin, download and push Hub repos. Knows no models."""
