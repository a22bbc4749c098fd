"""Training small models from random weights with any mixer, and studies that compare many of them."""
