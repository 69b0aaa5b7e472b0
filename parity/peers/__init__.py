"""Adapters to independent implementations by others; they check the reference and import their package inside."""
