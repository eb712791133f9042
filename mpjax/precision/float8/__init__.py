"""Float8 products: how operands are scaled and quantised, which layers use them, and the products themselves."""
