"""Float8 products: the scaling and quantisation of operands, the layers that use them, and the products themselves."""
