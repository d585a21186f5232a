"""Order to cash as functions on the log: from the order to the payment, the parcel and the mail.

Only `app` and the modules that it imports run on the platform. The other modules are for the demo
(`python -m functions.orders.demo`) and for the shop (`python -m functions.orders.shop`) on this
machine: services outside of the platform, a page for a browser, clients and the check.
"""
