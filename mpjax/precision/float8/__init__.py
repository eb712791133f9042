"""Float8 products: how operands are scaled and quantised, which layers they are for, and the products themselves."""
