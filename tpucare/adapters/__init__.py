"""The outer world behind the ports of `model`: one package or module per port; none imports another."""
