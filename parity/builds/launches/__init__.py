"""The production calls that are built: functions without arguments that launch on tensors without memory."""
