"""What travels: uploads and messages as bytes, models and algorithms as folders."""
