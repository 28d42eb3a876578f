"""What watches a training and changes nothing in it: devices, time, progress, figures."""
