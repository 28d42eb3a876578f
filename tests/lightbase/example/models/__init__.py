"""Networks in plain torch, one file each. A YAML names them by class path:
`example.models.cnn.CIFAR10CNN`."""
