"""Order to cash as functions on the log: from the order to the payment, the parcel and the mail.

Only `app` and the modules that it imports run on the platform. The others are for the demo
(`python -m functions.orders.demo`) and the shop on this machine
(`python -m functions.orders.shop`). They are services outside of the platform, a page for a
browser, clients and check.
"""
