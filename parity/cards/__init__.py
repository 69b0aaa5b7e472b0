"""One literal `CARD` per component: the only place that knows how the component is checked."""
