"""Small and large values on the CPU that GPU code reads."""
