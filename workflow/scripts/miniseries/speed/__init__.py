"""How fast a step is, predicted and measured."""
