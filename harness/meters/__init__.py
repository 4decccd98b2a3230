"""What the device says about itself while it works: clocks, power, temperature, energy.  A meter never stops a measurement:
what it cannot read is None, with the reason beside it.
"""
